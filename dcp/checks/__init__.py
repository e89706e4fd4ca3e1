"""The questions asked of a checkpoint, one module each: values in, findings out."""
