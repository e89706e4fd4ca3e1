"""A private Prefect server with pools, workers and deployments on this machine: `make deploy-local`.

`local` brings it up and takes it down, `processes` keeps the daemons, `server` asks Prefect's API, and
`project` makes of `deployments/prefect.yaml` what the settings ask for. `guard` is what workers start their
runs with.
"""
