"""One file an algorithm, behind the `Algorithm` protocol of `base.py`; `table.py` names them."""
