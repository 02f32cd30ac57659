"""Reading: fetched batches become records, and what cannot be read becomes a fault."""
