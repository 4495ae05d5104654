// SPDX-License-Identifier: Apache-2.0
//! A net-conf with what it means.

use weft_backends::backend::Backend;
use weft_backends::options::BadOption;
use weft_backends::register;
use weft_subnet::net_conf::{BadNetConf, NetConf};
use weft_subnet::text::sentence;

/// A net-conf, and the backend that it names.
pub struct ParsedConf {
    /// Its text, to see changes.
    pub text: String,
    /// What the text says.
    pub net_conf: NetConf,
    /// The backend that it names.
    pub backend: Box<dyn Backend>,
}

/// Why net-conf cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfError {
    /// It cannot be parsed, or a value in it is not valid.
    // In etcd every node may write net-conf, and the reason quotes it. So the reason is cut to the length of a sentence.
    #[error("{}", sentence(&format!("net-conf: {_0}")))]
    NetConf(#[from] BadNetConf),
    /// It names no backend that weft has, or a bad option.
    #[error("{}", sentence(&format!("net-conf: {_0}")))]
    Backend(#[from] BadOption),
}

impl ParsedConf {
    /// Reads net-conf and makes its backend.
    ///
    /// # Errors
    /// Net-conf cannot be used. The error names the key.
    pub fn parse(text: &str) -> Result<ParsedConf, ConfError> {
        let net_conf = NetConf::parse(text)?;
        let backend = register::make(&net_conf)?;
        Ok(ParsedConf { text: text.to_owned(), net_conf, backend })
    }
}

/// Returns a sentence that names what is in net-conf without an effect, because weft does not know the name.
pub fn ignored_names(net_conf: &NetConf) -> Option<String> {
    let options = register::unknown_options(net_conf).into_iter().map(|name| format!("Backend.{name}"));
    let names: Vec<String> = net_conf.unknown.iter().cloned().chain(options).collect();
    let sentence =
        || sentence(&format!("net-conf: these names have no effect, check their spelling: {}", names.join(", ")));
    (!names.is_empty()).then(sentence)
}
