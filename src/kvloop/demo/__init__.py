"""`kvloop demo`: one real conversation, on real engines, with and without reuse."""
