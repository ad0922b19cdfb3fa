"""The model: facts of its config, its files, and the transformers classes that compute it over our paged cache."""
