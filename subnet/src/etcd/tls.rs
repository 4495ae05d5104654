// SPDX-License-Identifier: Apache-2.0
//! From flags to connections: schemes, certificates, user. Whatever is wrong is said before anything connects.
//!
//! Certificates and keys are rotated while the agent runs: their files are read again for a new connection, and when they changed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};

use crate::source::Error;

use super::EtcdOptions;
use super::client::CALL_LIMIT;

/// etcd sends GOAWAY (too many pings) to clients that ping an idle stream more often than every 5 s, its
/// `--grpc-keepalive-min-time`. A stopped server is noticed sooner than this by the watch's own probe.
const PING_EVERY: Duration = Duration::from_secs(6);
const PING_LIMIT: Duration = Duration::from_secs(2);

/// One URL and how to connect to it, without the user.
pub(super) type Target = (String, ConnectOptions);

/// What tells one state of the files from another: inode, size and change time of each. A secret of Kubernetes is a link, and is
/// followed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Stamp(Vec<Option<(u64, u64, i64, i64)>>);

impl Stamp {
    /// As the files are now.
    pub(super) fn of(options: &EtcdOptions) -> Stamp {
        let files = [&options.ca_file, &options.cert_file, &options.key_file];
        let look =
            |path| fs::metadata(path).ok().map(|meta| (meta.ino(), meta.size(), meta.ctime(), meta.ctime_nsec()));
        Stamp(files.into_iter().flatten().map(look).collect())
    }
}

/// Reads the files again; the error is a sentence. A certificate that does not fit its key, or half of one, is an error, too.
pub(super) async fn again(options: &EtcdOptions) -> Result<Vec<ConnectOptions>, String> {
    let targets = endpoints(options).map_err(|error| error.to_string())?;
    for (url, how) in &targets {
        // Without a user this connects to nothing yet, but it puts certificate and key together.
        Client::connect([url], Some(how.clone())).await.map_err(|error| {
            let why = crate::retry::chain(&error);
            format!("--etcd-cafile, --etcd-certfile and --etcd-keyfile do not fit together: {why}")
        })?;
    }
    Ok(targets.into_iter().map(|(_, how)| how).collect())
}

fn read(flag: &str, path: &Path) -> Result<Vec<u8>, Error> {
    let text = std::fs::read(path).map_err(|error| {
        Error::Invalid(format!("{flag}: cannot read {}: {error}; give a readable PEM file", path.display()))
    })?;
    if !text.windows(11).any(|window| window == b"-----BEGIN ") {
        return Err(Error::Invalid(format!("{flag}: {} is not a PEM file", path.display())));
    }
    Ok(text)
}

fn tls(options: &EtcdOptions) -> Result<Option<TlsOptions>, Error> {
    let identity = match (&options.cert_file, &options.key_file) {
        (Some(cert), Some(key)) => {
            Some(Identity::from_pem(read("--etcd-certfile", cert)?, read("--etcd-keyfile", key)?))
        }
        (Some(_), None) => {
            return Err(Error::Invalid("--etcd-certfile is given without --etcd-keyfile; give both or neither".into()));
        }
        (None, Some(_)) => {
            return Err(Error::Invalid("--etcd-keyfile is given without --etcd-certfile; give both or neither".into()));
        }
        (None, None) => None,
    };
    let ca = options.ca_file.as_deref().map(|path| read("--etcd-cafile", path)).transpose()?;
    if ca.is_none() && identity.is_none() {
        return Ok(None);
    }
    let mut tls = TlsOptions::new();
    if let Some(ca) = ca {
        tls = tls.ca_certificate(Certificate::from_pem(ca));
    }
    if let Some(identity) = identity {
        tls = tls.identity(identity);
    }
    Ok(Some(tls))
}

/// `--etcd-username` and `--etcd-password`.
pub(super) fn user(options: &EtcdOptions) -> Result<Option<(String, String)>, Error> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    match (given(&options.username), given(&options.password)) {
        (Some(name), Some(password)) => Ok(Some((name, password))),
        (Some(_), None) => {
            Err(Error::Invalid("--etcd-username is given without --etcd-password; give both or neither".into()))
        }
        (None, Some(_)) => {
            Err(Error::Invalid("--etcd-password is given without --etcd-username; give both or neither".into()))
        }
        (None, None) => Ok(None),
    }
}

/// Says which files are not used, because an endpoint is plain http.
pub(super) fn warn_of_http(options: &EtcdOptions, targets: &[Target]) {
    if options.ca_file.is_some() || options.cert_file.is_some() {
        for (url, _) in targets.iter().filter(|(url, _)| url.starts_with("http:")) {
            tracing::warn!(endpoint = %url, "plain http: --etcd-cafile, -certfile and -keyfile are not used for it; say https");
        }
    }
}

/// What to connect to, in the order given.
pub(super) fn endpoints(options: &EtcdOptions) -> Result<Vec<Target>, Error> {
    let tls = tls(options)?;
    let base = ConnectOptions::new()
        .with_connect_timeout(CALL_LIMIT)
        .with_keep_alive(PING_EVERY, PING_LIMIT)
        .with_keep_alive_while_idle(false)
        .with_require_leader(true);
    let mut targets = Vec::new();
    for url in options.endpoints.iter().map(|url| url.trim().trim_end_matches('/')).filter(|url| !url.is_empty()) {
        let url = match (url.contains("://"), &tls) {
            (true, _) => url.to_owned(),
            (false, Some(_)) => format!("https://{url}"),
            (false, None) => format!("http://{url}"),
        };
        let target = match (url.split_once("://").map(|(scheme, _)| scheme), &tls) {
            (Some("https"), Some(tls)) if options.ca_file.is_some() => base.clone().with_tls(tls.clone()),
            (Some("https"), _) => {
                return Err(Error::Invalid(format!(
                    "--etcd-endpoints: {url} needs --etcd-cafile, the PEM file of the CA that signed etcd's certificate \
                     (for a public CA: the system's bundle)"
                )));
            }
            (Some("http"), _) => base.clone(),
            _ => return Err(Error::Invalid(format!("--etcd-endpoints: {url} is neither http:// nor https://"))),
        };
        targets.push((url, target));
    }
    if targets.is_empty() {
        return Err(Error::Invalid("--etcd-endpoints is empty; give at least one URL".into()));
    }
    Ok(targets)
}
