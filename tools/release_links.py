"""Makes the README's links absolute, for PyPI's page, and adds the project's addresses to the
metadata: a release does so before it builds.

    python tools/release_links.py https://HOST/OWNER/NAME v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def absolute(page: str, home: str, tag: str) -> str:
    """A page of the repository's root whose relative links lead to `home` at `tag`."""
    return LINK.sub(
        lambda m: f"{m[1]}[{m[2]}]({home}/{'raw' if m[1] else 'blob'}/{tag}/{m[3]})", page
    )


def with_addresses(project: str, home: str) -> str:
    """pyproject.toml with the project's addresses."""
    urls = f'[project.urls]\nRepository = "{home}"\nIssues = "{home}/issues"\n\n'
    place = "[project.optional-dependencies]"
    assert project.count(place) == 1
    return project.replace(place, urls + place)


if __name__ == "__main__":
    home, tag = sys.argv[1:]
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(), home, tag))
    project.write_text(with_addresses(project.read_text(), home))
