"""The living tree: branches seen and changed in a notebook, on a served page and on a saved one."""
