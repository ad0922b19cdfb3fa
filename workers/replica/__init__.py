"""One replica from the outside: the leader, its role, its end of the front link. The same for every pool."""
