"""The processes that are not the trainer, one package each. They share only the wire contract, never each other."""
