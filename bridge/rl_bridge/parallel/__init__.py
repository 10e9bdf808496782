"""How a model is spread over the workers of an engine, and documents over the tokens that they compute."""
