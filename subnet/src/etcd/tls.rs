// SPDX-License-Identifier: Apache-2.0
//! Turns flags into connection options: URLs, certificates, and the user. Everything that is wrong is reported before anything connects.
//!
//! Certificates and keys are rotated while the agent runs. So their files are read again for each new connection, and when they change.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};

use crate::retry::chain;
use crate::source::Error;

use super::{CALL_LIMIT, EtcdOptions};

/// Interval of gRPC pings. etcd closes the connection (GOAWAY, too many pings) of clients that ping an idle stream more often than its
/// `--grpc-keepalive-min-time`, which is 5 s. The watch has a check of its own, which notices a stopped server sooner.
const PING_EVERY: Duration = Duration::from_secs(6);
const PING_LIMIT: Duration = Duration::from_secs(2);

/// A URL, and the options to connect to it without a user.
pub(super) type Target = (String, ConnectOptions);

/// Identifies one version of the files. Symbolic links, such as those of a Kubernetes secret, are followed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Stamp(Vec<Option<FileVersion>>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    size: u64,
    /// The time of the last change: seconds, and nanoseconds.
    changed: (i64, i64),
}

impl Stamp {
    /// Examines the files.
    pub(super) fn of(options: &EtcdOptions) -> Stamp {
        let files = [&options.ca_file, &options.cert_file, &options.key_file];
        let version = |path| {
            let meta = fs::metadata(path).ok()?;
            Some(FileVersion { inode: meta.ino(), size: meta.size(), changed: (meta.ctime(), meta.ctime_nsec()) })
        };
        Stamp(files.into_iter().flatten().map(version).collect())
    }
}

/// What is wrong with the flags of etcd, or with the files that they name. The message names the flag and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadOptions {
    #[error("{flag}: cannot read {}: {cause}; give a readable PEM file", path.display())]
    Unreadable { flag: &'static str, path: PathBuf, cause: String },
    #[error("{flag}: {} is not a PEM file", path.display())]
    NotPem { flag: &'static str, path: PathBuf },
    #[error("{given} is given without {missing}; give both or neither")]
    Half { given: &'static str, missing: &'static str },
    #[error(
        "--etcd-endpoints: {url} needs --etcd-cafile, the PEM file of the CA that signed etcd's certificate, because this \
         system has no CA certificates (for a public CA install ca-certificates, in a container mount /etc/ssl/certs of the \
         node, or set SSL_CERT_FILE)"
    )]
    NoCa { url: String },
    #[error("--etcd-endpoints: {url} is neither http:// nor https://")]
    Scheme { url: String },
    #[error("--etcd-endpoints is empty; give at least one URL")]
    NoEndpoints,
    #[error("--etcd-cafile, --etcd-certfile and --etcd-keyfile do not fit together: {0}")]
    Mismatch(String),
}

impl From<BadOptions> for Error {
    fn from(bad: BadOptions) -> Error {
        Error::Invalid(bad.to_string())
    }
}

/// Reads the files again. A certificate that does not fit its key, or is incomplete, is also an error.
pub(super) async fn read_again(options: &EtcdOptions) -> Result<Vec<ConnectOptions>, BadOptions> {
    let targets = endpoints(options)?;
    for (url, how) in &targets {
        // Without a user this does not connect yet, but it checks that certificate and key fit together.
        let client = Client::connect([url], Some(how.clone())).await;
        client.map_err(|error| BadOptions::Mismatch(chain(&error)))?;
    }
    Ok(targets.into_iter().map(|(_, how)| how).collect())
}

fn read(flag: &'static str, path: &Path) -> Result<Vec<u8>, BadOptions> {
    let unreadable = |error: io::Error| BadOptions::Unreadable { flag, path: path.into(), cause: error.to_string() };
    let text = fs::read(path).map_err(unreadable)?;
    if !text.windows(11).any(|window| window == b"-----BEGIN ") {
        return Err(BadOptions::NotPem { flag, path: path.into() });
    }
    Ok(text)
}

fn tls(options: &EtcdOptions) -> Result<TlsOptions, BadOptions> {
    let identity = match (&options.cert_file, &options.key_file) {
        (Some(cert), Some(key)) => {
            Some(Identity::from_pem(read("--etcd-certfile", cert)?, read("--etcd-keyfile", key)?))
        }
        (Some(_), None) => {
            return Err(BadOptions::Half { given: "--etcd-certfile", missing: "--etcd-keyfile" });
        }
        (None, Some(_)) => {
            return Err(BadOptions::Half { given: "--etcd-keyfile", missing: "--etcd-certfile" });
        }
        (None, None) => None,
    };
    let ca = options.ca_file.as_deref().map(|path| read("--etcd-cafile", path)).transpose()?;
    // As with Go's clients, the CAs of the system count only if no other is named.
    let mut tls = match ca {
        Some(ca) => TlsOptions::new().ca_certificate(Certificate::from_pem(ca)),
        None => TlsOptions::new().with_native_roots(),
    };
    if let Some(identity) = identity {
        tls = tls.identity(identity);
    }
    Ok(tls)
}

/// Returns true if this system has CA certificates: where OpenSSL looks for them, or in SSL_CERT_FILE or SSL_CERT_DIR.
fn has_system_cas() -> bool {
    !rustls_native_certs::load_native_certs().certs.is_empty()
}

/// Returns `--etcd-username` and `--etcd-password`.
pub(super) fn user(options: &EtcdOptions) -> Result<Option<(String, String)>, BadOptions> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    match (given(&options.username), given(&options.password)) {
        (Some(name), Some(password)) => Ok(Some((name, password))),
        (Some(_), None) => Err(BadOptions::Half { given: "--etcd-username", missing: "--etcd-password" }),
        (None, Some(_)) => Err(BadOptions::Half { given: "--etcd-password", missing: "--etcd-username" }),
        (None, None) => Ok(None),
    }
}

/// Logs that the certificate files are not used for an endpoint that is plain http.
pub(super) fn warn_of_http(options: &EtcdOptions, targets: &[Target]) {
    if options.ca_file.is_some() || options.cert_file.is_some() {
        for (url, _) in targets.iter().filter(|(url, _)| url.starts_with("http:")) {
            tracing::warn!(endpoint = %url, "plain http: --etcd-cafile, -certfile and -keyfile are not used for it; say https");
        }
    }
}

/// Returns what to connect to, in the order of the flag.
pub(super) fn endpoints(options: &EtcdOptions) -> Result<Vec<Target>, BadOptions> {
    let tls = tls(options)?;
    let names_files = options.ca_file.is_some() || options.cert_file.is_some();
    let base = ConnectOptions::new()
        .with_connect_timeout(CALL_LIMIT)
        .with_keep_alive(PING_EVERY, PING_LIMIT)
        .with_keep_alive_while_idle(false)
        .with_require_leader(true);
    let mut targets = Vec::new();
    for url in options.endpoints.iter().map(|url| url.trim().trim_end_matches('/')).filter(|url| !url.is_empty()) {
        let url = match url.contains("://") {
            true => url.to_owned(),
            false if names_files => format!("https://{url}"),
            false => format!("http://{url}"),
        };
        let target = match url.split_once("://") {
            Some(("https", _)) if options.ca_file.is_none() && !has_system_cas() => {
                return Err(BadOptions::NoCa { url });
            }
            Some(("https", _)) => base.clone().with_tls(tls.clone()),
            Some(("http", _)) => base.clone(),
            _ => return Err(BadOptions::Scheme { url }),
        };
        targets.push((url, target));
    }
    if targets.is_empty() {
        return Err(BadOptions::NoEndpoints);
    }
    Ok(targets)
}
