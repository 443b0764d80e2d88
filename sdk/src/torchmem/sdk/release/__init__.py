"""Memory that is returned to the driver, in tiers, on request, and for neighbors."""
