"""The report: one page that says which steps are safe, which is latest, what is wrong and what it costs.

`checkpoint` gathers what is said of one checkpoint, `runs` what is said of runs, as frozen values; `page`
renders them with the templates beside it into one HTML document that needs nothing else. `charts` turns
numbers into the geometry that the templates draw; `contents`, `chunking` and `packing` make what the page
unpacks on demand; `saving` writes it, `serving` shows it on loopback, `publication` puts it beside a
published step.
"""
