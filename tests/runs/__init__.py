"""The long runs behind make targets of their own; `make test` runs none of them."""
