"""Networks behind one contract (base.py): memory for tests, tls and libp2p for runs, shaped for a modelled link."""
