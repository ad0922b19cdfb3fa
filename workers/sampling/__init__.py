"""From logits to tokens: filters, a counter-based random generator, and what to tell about a draw."""
