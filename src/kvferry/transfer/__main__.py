"""Entry of the transfer process; see process.py."""

from kvferry.transfer.process import main

main()
