"""The two colours of `ports.Runtime`, and the runner that makes blocking code of coroutines."""
