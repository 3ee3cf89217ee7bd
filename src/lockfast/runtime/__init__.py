"""The two runtimes behind `ports.Runtime`, and the runner that makes blocking code of coroutines."""
