"""Runs the engine's step plans on a model: tensors of a plan, the paged cache, forward pass and sampling."""
