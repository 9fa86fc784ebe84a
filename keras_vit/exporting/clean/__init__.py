"""What checks an artefact in a process of its own, where Keras and keras_vit cannot be imported.

These modules know the standard library, NumPy and, where an artefact needs it, its runtime.
"""
