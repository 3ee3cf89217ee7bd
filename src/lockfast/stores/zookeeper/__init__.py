"""The ZooKeeper store: locks on ZooKeeper 3.5 or later, through kazoo."""
