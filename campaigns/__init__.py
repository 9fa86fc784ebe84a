"""Attacks on the files that keras_vit reads and writes, each repeatable from a seed."""
