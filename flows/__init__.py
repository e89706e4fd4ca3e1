"""The lifecycle put together: the flows, the settings file and the `ckpt` command."""
