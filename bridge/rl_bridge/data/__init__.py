"""Where prompts come from: the user's files, a Hugging Face dataset, or a task generated here."""
