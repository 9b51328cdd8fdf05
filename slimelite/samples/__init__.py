"""The currency: samples, and the table of them."""
