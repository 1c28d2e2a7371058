"""Who a peer is, who may take part in a run, and how that is proven."""
