"""The report: one page that says which steps are safe, which is latest, what is wrong and what it costs.

`checkpoint` gathers what is said of one checkpoint, `runs` what is said of runs, as frozen values;
`checkpoint_page` and `run_page` render them with the templates beside them, each into one `document` that
needs nothing else. `charts` turns numbers into the geometry that the templates draw; `contents`, `chunking`
and `packing` make what the page unpacks on demand. `making` writes a page where somebody asks for one,
`publication` beside a published step; `serving` shows pages on loopback.
"""
