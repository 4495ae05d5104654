// SPDX-License-Identifier: Apache-2.0
//! Reads from when until when certificates are valid.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use x509_cert::Certificate;
use x509_cert::der::{self, DateTime};

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

/// Why the certificates of a file are not known.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The file cannot be read.
    #[error("{}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the kernel answered.
        source: io::Error,
    },
    /// The file is no chain of certificates in PEM.
    #[error("{}: {source}", file.display())]
    Parse {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        source: der::Error,
    },
    /// The file has no certificate.
    #[error("{}: it contains no certificate", .0.display())]
    Empty(PathBuf),
}

impl CertificateError {
    /// Returns true if the file may be good, and this user may not read it.
    pub fn is_denied(&self) -> bool {
        matches!(self, CertificateError::Read { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }
}

/// Reads the certificates of a file in PEM. A file may contain a chain.
///
/// # Errors
/// The file cannot be read, or contains no certificate.
pub fn read(purpose: &'static str, file: &Path) -> Result<Vec<CertificateFact>, CertificateError> {
    let text = fs::read(file).map_err(|source| CertificateError::Read { file: file.to_owned(), source })?;
    let chain = Certificate::load_pem_chain(&text)
        .map_err(|source| CertificateError::Parse { file: file.to_owned(), source })?;
    if chain.is_empty() {
        return Err(CertificateError::Empty(file.to_owned()));
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
