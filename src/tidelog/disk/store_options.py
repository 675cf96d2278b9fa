"""Options of object stores for tables: credentials, endpoints, regions, under the names of three libraries.

    given                            aws_access_key_id (deltalake), access_key (pyarrow), s3.access-key-id (pyiceberg),
                                     or in the address: s3://key:secret@bucket/table?region=eu-central-1
    to_arrow, to_delta, to_iceberg   the same options for each library

An option that is not given comes from the environment or the machine, as each library documents it. What the libraries
read from different variables is looked up here: endpoints and the region of S3 once, other options of Google and Azure
where a store is opened (`with_environment`). Values may be secret: no message and no `repr` shows them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from tidelog.addresses import scheme_of
from tidelog.errors import BadInput

# The scheme under which tables are known, by the scheme that is given.
TABLE_SCHEMES: Final = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "abfs": "abfs", "abfss": "abfss"}
_TRUE: Final = frozenset(("1", "true", "yes", "on"))

# By family: our name → (name for deltalake, parameter of pyarrow, property of pyiceberg), other accepted names.
_NAMES: Final[dict[str, dict[str, tuple[tuple[str, str, str], tuple[str, ...]]]]] = {
    "s3": {
        "access_key": (("AWS_ACCESS_KEY_ID", "access_key", "s3.access-key-id"), ("access_key_id",)),
        "secret_key": (("AWS_SECRET_ACCESS_KEY", "secret_key", "s3.secret-access-key"), ("secret_access_key",)),
        "session_token": (("AWS_SESSION_TOKEN", "session_token", "s3.session-token"), ("token", "aws_token")),
        "region": (("AWS_REGION", "region", "s3.region"), ("aws_default_region", "default_region")),
        "endpoint": (
            ("AWS_ENDPOINT_URL", "endpoint_override", "s3.endpoint"),
            ("aws_endpoint", "endpoint", "endpoint_url", "aws_endpoint_url_s3"),
        ),
        "allow_http": (("AWS_ALLOW_HTTP", "", ""), ("allow_http",)),
        "virtual_hosts": (
            ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "force_virtual_addressing", "s3.force-virtual-addressing"),
            ("virtual_hosted_style_request",),
        ),
        "anonymous": (("AWS_SKIP_SIGNATURE", "anonymous", "s3.anonymous"), ("skip_signature",)),
        "role_arn": (("AWS_IAM_ROLE_ARN", "role_arn", "s3.role-arn"), ()),
        "role_session": (("AWS_IAM_ROLE_SESSION_NAME", "session_name", "s3.role-session-name"), ()),
    },
    "gs": {
        "service_account": (
            ("GOOGLE_SERVICE_ACCOUNT", "", ""),
            ("service_account", "google_application_credentials", "service_account_path"),
        ),
        "anonymous": (("GOOGLE_SKIP_SIGNATURE", "anonymous", "gcs.anonymous"), ("skip_signature",)),
        "endpoint": (("GOOGLE_BASE_URL", "endpoint_override", "gcs.service.host"), ("endpoint", "base_url")),
        "allow_http": (("ALLOW_HTTP", "", ""), ()),
    },
    "abfs": {
        "account": (("AZURE_STORAGE_ACCOUNT_NAME", "account_name", "adls.account-name"), ("azure_account_name",)),
        "account_key": (
            ("AZURE_STORAGE_ACCOUNT_KEY", "account_key", "adls.account-key"),
            ("azure_storage_access_key", "access_key"),
        ),
        "sas_token": (("AZURE_STORAGE_SAS_TOKEN", "sas_token", "adls.sas-token"), ("azure_storage_sas_key",)),
        "tenant_id": (("AZURE_STORAGE_TENANT_ID", "tenant_id", "adls.tenant-id"), ("azure_tenant_id",)),
        "client_id": (("AZURE_STORAGE_CLIENT_ID", "client_id", "adls.client-id"), ("azure_client_id",)),
        "client_secret": (
            ("AZURE_STORAGE_CLIENT_SECRET", "client_secret", "adls.client-secret"),
            ("azure_client_secret",),
        ),
        # Of blobs: https://account.blob.core.windows.net, or http://host:port/account of an emulator.
        "endpoint": (("AZURE_STORAGE_ENDPOINT", "", ""), ("azure_endpoint", "endpoint", "blob_endpoint")),
        "allow_http": (("AZURE_ALLOW_HTTP", "", ""), ("allow_http",)),
        "emulator": (("AZURE_STORAGE_USE_EMULATOR", "", ""), ("use_emulator",)),  # Azurite
    },
}
_FLAGS: Final = frozenset(("allow_http", "virtual_hosts", "anonymous", "emulator"))
_SECRETS: Final = frozenset(
    ("access_key", "secret_key", "session_token", "account_key", "sas_token", "client_secret", "client_id")
)
# Other options of pyarrow: they are parts of an endpoint.
_PARTS: Final = {
    "s3": ("scheme",),
    "gs": ("scheme",),
    "abfs": ("blob_storage_authority", "blob_storage_scheme", "dfs_storage_authority", "dfs_storage_scheme"),
}
# Ways to say who one is: where one of them is given, the environment adds none.
_IDENTITIES: Final = frozenset(("service_account", "anonymous", "account_key", "sas_token", "client_id"))
_AMBIGUOUS: Final = frozenset(("token", "anonymous", "access_key"))  # also properties of catalogs, or of several stores


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options by our names. Small and picklable: tasks carry them to executors."""

    family: str  # s3, gs, abfs
    values: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_arrow(self) -> dict[str, Any]:
        """Return parameters of the file system of pyarrow."""
        made: dict[str, Any] = {}
        for name, value in self.values.items():
            parameter = _NAMES[self.family][name][0][1]
            if parameter:
                made[parameter] = value in _TRUE if name in _FLAGS else value
        if endpoint := made.get("endpoint_override"):
            made["scheme"], _, made["endpoint_override"] = endpoint.rpartition("://")
            made["scheme"] = made["scheme"] or "https"
        return made | self._azure_services()

    def _azure_services(self) -> dict[str, str]:
        """Return the parameters of pyarrow for an endpoint of Azure: where its two services are."""
        endpoint = self.values.get("endpoint")
        if self.family != "abfs" or endpoint is None:
            return {}
        scheme, _, rest = endpoint.rpartition("://")
        host, _, path = rest.partition("/")
        account = self.values.get("account", "")
        if path.strip("/") == "" and account and host.startswith(f"{account}."):
            host = host.removeprefix(account)  # pyarrow puts the account before a name that begins with a dot
        services = {"blob_storage": host, "dfs_storage": host.replace(".blob.", ".dfs.", 1)}
        return {
            f"{service}_{what}": value
            for service, authority in services.items()
            for what, value in (("authority", authority), ("scheme", scheme or "https"))
        }

    def to_delta(self) -> dict[str, str]:
        """Return `storage_options` of deltalake."""
        return {_NAMES[self.family][name][0][0]: value for name, value in self.values.items()}

    def to_iceberg(self) -> dict[str, str]:
        """Return properties of pyiceberg."""
        found = {_NAMES[self.family][name][0][2]: value for name, value in self.values.items()}
        found |= {f"adls.{name.replace('_', '-')}": value for name, value in self._azure_services().items()}
        return {name: value for name, value in found.items() if name}

    def with_environment(self) -> StoreOptions:
        """Return these options and those of Google and Azure that only deltalake finds in the environment."""
        if self.family == "s3":
            return self
        given = any(name in self.values for name in _IDENTITIES)
        found = {}
        for name, (names, others) in _NAMES[self.family].items():
            prefixed = [each.upper() for each in (names[0], *others) if each.lower().startswith(("azure", "google"))]
            value = next((os.environ[each] for each in prefixed if os.environ.get(each)), None)
            if value is not None and not (given and name in _IDENTITIES | {"tenant_id", "client_secret"}):
                found[name] = value
        if "account_key" in found:
            found.pop("sas_token", None)  # pyarrow takes one of them
        return StoreOptions(self.family, {**found, **self.values})

    def remove_secrets(self, text: str) -> str:
        """Return a message of a library without the values that may be secret."""
        values = {value for name, value in self.values.items() if name in _SECRETS and len(value) > 3}
        for value in sorted(values, key=len, reverse=True):
            text = text.replace(value, "…")
        return text


def family_of(scheme: str) -> str:
    """Return s3, gs or abfs for a scheme of TABLE_SCHEMES."""
    return "abfs" if scheme.startswith("abfs") else TABLE_SCHEMES[scheme]


def parse_store_address(address: str, given: Mapping[str, str] | None) -> tuple[str, StoreOptions]:
    """Return the address of a table without credentials, and its options.

    Raises:
        BadInput: the address names no bucket, or an option is unknown.
    """
    scheme = scheme_of(address)
    assert scheme in TABLE_SCHEMES, "the caller has checked that"
    try:
        parts = urlsplit(address)
        query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    except ValueError:
        raise BadInput(f"the address {scheme}://… does not read; nothing was done, check it") from None
    user, _, host = parts.netloc.rpartition("@")
    values = {**query, **(given or {})}
    if scheme.startswith("abfs"):
        account, bucket = host, user
        if not user:  # abfs://container/path, with the account as an option
            account, bucket = "", host
        if ":" in bucket:
            raise BadInput(
                f"the address {scheme}://… has a password in it; nothing was done, pass it as a storage option"
            )
        netloc = f"{bucket}@{account}" if account else bucket
        if account:
            values.setdefault("account_name", account.partition(".")[0])
    else:
        bucket = netloc = host
        key, _, secret = user.partition(":")
        if key and scheme.startswith("s3"):
            values = {"access_key": unquote(key), "secret_key": unquote(secret), **values}
        elif user:
            raise BadInput(f"the address {scheme}://… has a user in it; nothing was done, leave it out")
    path = parts.path.rstrip("/")
    if not bucket or "//" in path or parts.fragment:
        raise BadInput(
            f"{scheme}://{netloc}{path} names no table in a bucket; nothing was done, write s3://bucket/lake/orders"
        )
    if not path:
        raise BadInput(
            f"{scheme}://{netloc} is a whole bucket; nothing was done, name a place in it for the table, as in "
            f"{scheme}://{netloc}/orders"
        )
    family = family_of(scheme)
    options = StoreOptions(family, _complete(family, _by_our_names(family, values), bucket))
    return f"{TABLE_SCHEMES[scheme]}://{netloc}{path}", options


def options_for(family: str, given: Mapping[str, str]) -> tuple[StoreOptions | None, dict[str, str]]:
    """Split options of several libraries into those of a family of stores, None if there are none, and the rest."""
    known = _known_names(family)
    if family == "abfs":
        known |= {f"adls.{part.replace('_', '-')}": part for part in _PARTS[family]}
    found = {key: value for key, value in given.items() if key.lower() in known and key.lower() not in _AMBIGUOUS}
    rest = {key: value for key, value in given.items() if key not in found}
    if not found:
        return None, rest
    values = _by_our_names(family, found)
    return StoreOptions(family, values if family == "s3" else _complete(family, values, "")), rest


def _known_names(family: str) -> dict[str, str]:
    """Return our names by all names that are accepted, in lower case."""
    return {
        other.lower(): name
        for name, (names, others) in _NAMES[family].items()
        for other in (name, *names, *others)
        if other
    }


def _by_our_names(family: str, given: Mapping[str, str]) -> dict[str, str]:
    known = _known_names(family)
    made: dict[str, str] = {}
    parts: dict[str, str] = {}
    for key, value in given.items():
        name, part = known.get(key.lower()), key.lower().removeprefix("adls.").replace("-", "_")
        if name is None and part not in _PARTS[family]:
            usual = ", ".join(sorted(names[0] for names, _ in _NAMES[family].values()))
            raise BadInput(
                f"the storage option {key[:60]!r} is not known for {family}:; nothing was done, the options are {usual}"
            )
        if name is None:
            parts[part] = str(value)
            continue
        if name in _FLAGS:
            value = "true" if str(value).lower() in _TRUE else "false"
        made[name] = str(value)
    if "blob_storage_authority" in parts:
        scheme, authority = parts.get("blob_storage_scheme", "https"), parts["blob_storage_authority"]
        account = made.get("account", "")
        is_name = authority.startswith(".")
        made["endpoint"] = f"{scheme}://{account}{authority}" if is_name else f"{scheme}://{authority}/{account}"
    if "scheme" in parts and "endpoint" in made and "://" not in made["endpoint"]:
        made["endpoint"] = f"{parts['scheme']}://{made['endpoint']}"
    return made


_CREDENTIAL_VARIABLES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_CREDENTIAL_FILES: Final = (
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ("AWS_CONFIG_FILE", "~/.aws/config"),
)


def _check_credentials(values: Mapping[str, str], endpoint: str | None, bucket: str) -> None:
    """Raise BadInput for half a key, and for a server that is not Amazon's where there is no key at all: the libraries
    would look for Amazon's own machines, for minutes."""
    if ("access_key" in values) != ("secret_key" in values):
        missing = "AWS_SECRET_ACCESS_KEY" if "access_key" in values else "AWS_ACCESS_KEY_ID"
        raise BadInput(
            f"the credentials for the bucket {bucket} lack {missing}; nothing was done, give both storage options"
        )
    has_own = any(name in values for name in ("access_key", "role_arn", "anonymous"))
    has_others = any(os.environ.get(name) for name in _CREDENTIAL_VARIABLES) or any(
        os.path.exists(os.path.expanduser(os.environ.get(name) or path)) for name, path in _CREDENTIAL_FILES
    )
    if endpoint and not has_own and not has_others:
        raise BadInput(
            f"there are no credentials for the bucket {bucket}; nothing was done, give the storage options "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or set them in the environment, or AWS_SKIP_SIGNATURE=true "
            "for a public bucket"
        )


_ENDPOINT_VARIABLES: Final = {
    "gs": ("GOOGLE_BASE_URL",),
    "abfs": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


def _with_endpoint(values: dict[str, str]) -> dict[str, str]:
    """Return options whose endpoint has a scheme; one without encryption is allowed where it is named."""
    endpoint = values["endpoint"]
    whole = endpoint if "://" in endpoint else f"https://{endpoint}"
    return {**values, "endpoint": whole, **({"allow_http": "true"} if whole.startswith("http://") else {})}


def _complete(family: str, values: dict[str, str], bucket: str) -> dict[str, str]:
    """Add what the environment says and the libraries would not all read."""
    if family != "s3":
        if values.get("emulator") == "true":  # deltalake looks for it there, and nowhere else
            base = os.environ.get("AZURITE_BLOB_STORAGE_URL") or "http://127.0.0.1:10000"
            account = values.get("account", "devstoreaccount1")
            values = {**values, "account": account, "endpoint": f"{base.rstrip('/')}/{account}"}
        variables = _ENDPOINT_VARIABLES[family]
        found = values.get("endpoint") or next((os.environ[name] for name in variables if os.environ.get(name)), "")
        return _with_endpoint({**values, "endpoint": found}) if found else values
    endpoint = values.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        values = _with_endpoint({**values, "endpoint": endpoint})
    _check_credentials(values, endpoint, bucket)
    region = values.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region and not endpoint:
        from pyarrow.fs import resolve_s3_region

        with suppress(OSError):  # the first operation shows what is wrong
            region = resolve_s3_region(bucket)
    values["region"] = region or "us-east-1"
    return values
