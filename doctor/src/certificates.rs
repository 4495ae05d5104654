// SPDX-License-Identifier: Apache-2.0
//! Reads from when until when certificates are valid.

use std::fs;
use std::path::{Path, PathBuf};

use x509_cert::Certificate;
use x509_cert::der::DateTime;

/// A certificate of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFact {
    /// What it is for, such as `client certificate of etcd`.
    pub purpose: &'static str,
    /// The file.
    pub file: PathBuf,
    /// The subject.
    pub subject: String,
    /// The first second at which it is valid, since 1970.
    pub from: u64,
    /// The last second at which it is valid, since 1970.
    pub until: u64,
}

/// Reads the certificates of a file in PEM. A file may contain a chain.
///
/// # Errors
/// The file cannot be read, or contains no certificate. The text is for people.
pub fn read(purpose: &'static str, file: &Path) -> Result<Vec<CertificateFact>, String> {
    let text = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let chain = Certificate::load_pem_chain(&text).map_err(|error| format!("{}: {error}", file.display()))?;
    if chain.is_empty() {
        return Err(format!("{}: it contains no certificate", file.display()));
    }
    let fact = |certificate: &Certificate| {
        let about = certificate.tbs_certificate();
        let (from, until) = (about.validity().not_before, about.validity().not_after);
        CertificateFact {
            purpose,
            file: file.to_owned(),
            subject: about.subject().to_string(),
            from: from.to_unix_duration().as_secs(),
            until: until.to_unix_duration().as_secs(),
        }
    };
    Ok(chain.iter().map(fact).collect())
}

/// Formats a time as `2026-11-23T13:00:00Z`.
pub fn date(seconds: u64) -> String {
    let date = DateTime::from_unix_duration(std::time::Duration::from_secs(seconds));
    date.map_or_else(|_| format!("second {seconds} after 1970"), |date| date.to_string())
}
