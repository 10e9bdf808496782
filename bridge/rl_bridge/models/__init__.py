"""Models and tokenizers: made from a config, loaded from a folder or a hub, written in Hugging Face format."""
