"""Where islands meet: a store of texts with three verbs, its clients and its server."""
