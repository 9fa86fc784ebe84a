"""A stand-in for `tensorflow_model_server`: its C++ loader, its protocols, its batching rules."""
