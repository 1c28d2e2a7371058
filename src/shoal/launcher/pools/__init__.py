"""`shoal launch`: peers kept in a run on other machines. pool.py is the interface; a module for each kind of pool."""
