"""Language models for the engine: weights, tokenizer, forward pass, sampling. Import the submodule that you need."""
