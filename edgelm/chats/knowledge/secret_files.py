"""Which files hold keys and passwords, by their names and by how they begin.

Knows nothing of folders and limits. Of the secrets in the middle of a text only private keys are found.
"""

from __future__ import annotations

import re
from fnmatch import translate
from functools import cache

# Names in lower case. Hidden files, such as .env and .netrc, are never read; these are names without a dot.
_NAMES = (
    "*.pem *.key *.ppk *.p8 *.p12 *.pfx *.pkcs12 *.jks *.jceks *.keystore *.keytab *.asc *.gpg *.pgp *.age *.kdb "
    "*.kdbx *.psafe3 *.agilekeychain *.1pux *.ovpn *.rdp *.tfstate *.tfstate.* *.tfvars *.mobileprovision id_rsa* "
    "id_dsa* id_ecdsa* id_ed25519* *_rsa *_dsa *_ecdsa *_ed25519 ssh_host_*_key authorized_keys env *.env "
    "env.local env.production netrc _netrc pgpass htpasswd htdigest shadow gshadow kubeconfig credential "
    "credentials credential.* credentials.* secret secrets secret.* secrets.* *.secret *.secrets password "
    "passwords password.* passwords.* passwd passwd.* token tokens *.token *_history *.history "
    "logins.json key3.db key4.db wallet.dat master.key envrc *.envrc auth.json auth.toml keys.json keys.toml keys.yaml "
    "keys.yml keys.ini keys.txt terraformrc terraform.rc vault_pass* *vault-pass* *vault_password* rclone.conf "
    "kaggle.json client_secret* *_tokens.db tool_consents.json"
).split()
# The same, except where it is a page or code about such things.
_NAME_PARTS = (
    "credential* *credentials* secret* *secrets* *password* *apikey* *api_key* *api-key* *service?account* "
    "token.* tokens.*".split()
)
_PAGES_AND_CODE = tuple(
    ".md .markdown .rst .adoc .tex .html .py .pyi .js .mjs .jsx .ts .tsx .go .rs .c .h .cc .cpp .hpp .java .kt .swift "
    ".cs .rb .php .sh .sql".split()
)
_FOLDERS = frozenset(".ssh .gnupg .aws .azure .kube .docker .password-store .pki .electrum .bitcoin".split())

# Folder and file, where the name of the file alone says nothing.
_PLACES = frozenset(
    {("gh", "hosts.yml"), ("glab-cli", "config.yml"), (".m2", "settings.xml"), (".gradle", "gradle.properties")}
    | {("edgelm", "config.toml"), ("pip", "pip.conf"), (".pip", "pip.conf"), (".cargo", "config.toml")}
)

_HEADER = re.compile(
    r"\s*(?:-----BEGIN [A-Z0-9 ]*PRIVATE KEY|---- BEGIN SSH2 ENCRYPTED PRIVATE KEY|PuTTY-User-Key-File-\d|"
    r"AGE-SECRET-KEY-1|-----BEGIN PGP (?:PRIVATE KEY BLOCK|MESSAGE)|-----BEGIN AGE ENCRYPTED FILE|\$ANSIBLE_VAULT;)"
)
_KEY_INSIDE = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[^\S\n]*(?:\\r)?(?:\n|\\n)"  # \n: in a string of JSON or code
    r"(?:[\w-]+: [^\n]*\n|\n)*"  # headers
    r"[^\S\n]*[A-Za-z0-9+/=]{40}"
)


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Compile the patterns of names and of parts; that takes 15 ms, so it waits for the first name."""
    name, part = (re.compile("|".join(map(translate, names))) for names in (_NAMES, _NAME_PARTS))
    return name, part


def is_secret_name(name: str) -> bool:
    """Tell whether a file holds a secret, as its name says."""
    name = name.lower()
    whole, part = _patterns()
    return bool(whole.match(name) or (part.match(name) and not name.endswith(_PAGES_AND_CODE)))


def is_secret_folder(name: str) -> bool:
    """Tell whether all that lies in a folder of this name is secret."""
    return name.lower() in _FOLDERS


def is_secret_place(path: str) -> bool:
    """Tell whether a file holds a secret, as its name and that of its folder say."""
    folder, _, name = path.lower().rpartition("/")
    return (folder.rpartition("/")[2], name) in _PLACES


def holds_key(text: str) -> bool:
    """Tell whether a text begins as one with a private key or what is encrypted, or holds a whole private key."""
    return bool(_HEADER.match(text) or _KEY_INSIDE.search(text))
