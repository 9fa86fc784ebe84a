"""Attacks on what keras_vit reads and writes, each repeatable from a seed."""
