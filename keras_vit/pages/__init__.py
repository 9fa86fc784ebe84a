"""Self-contained HTML pages: a base template, a renderer, and pictures written into the page."""

from keras_vit.pages.rendering import data_uri, render, thumbnail, write_page

__all__ = ["data_uri", "render", "thumbnail", "write_page"]
