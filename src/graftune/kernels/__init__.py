"""One folder an operation: `reference.py` states the formula in plain torch and is the path of every device that has
no kernel of its own; `__init__.py` is the public function with its shape contract. Nothing here knows of models.

Legend: T tokens, D model width, N heads, K key/value heads, H head width, F feed-forward width, R rank, V vocabulary.
"""
