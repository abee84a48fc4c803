"""How fast each residual topology would generate on a given machine: an analytic model of a timeline, no compiler."""
