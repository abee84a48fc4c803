"""Measures a machine's constants on the devices at hand."""
