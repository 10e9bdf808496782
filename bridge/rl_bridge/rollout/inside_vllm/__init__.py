"""Code that runs in vLLM's own processes, a file a patch. Importing this package imports no vLLM."""
