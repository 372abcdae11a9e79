"""`python -m maecho`"""

from maecho.cli.app import main

main()
