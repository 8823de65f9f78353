"""What the fields of a Hugging Face `config.json` mean, by family of models."""
