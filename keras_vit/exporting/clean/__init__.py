"""Checks of an artefact in a process of their own, where Keras and keras_vit cannot be imported.

These modules import only the standard library, NumPy and the runtime of the artefact.
"""
