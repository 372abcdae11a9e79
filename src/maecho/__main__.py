"""`python -m maecho`"""

from maecho.cli import main

main()
