// SPDX-License-Identifier: Apache-2.0
//! STATUS: reports whether the node's network works.
//!
//! If STATUS fails, the container runtime reports that the network is not ready. Kubernetes then makes the node NotReady,
//! and after some minutes it evicts all pods of the node. STATUS therefore fails only for what makes every ADD fail and
//! concerns the whole node. Addresses that are all taken are not such a reason, nor is an agent that is not ready: the
//! pods of the node work in both cases, and ADD itself says what is wrong.

use serde_json::Value;

use crate::conf::Conf;
use crate::delegate;
use crate::env::Verb;
use crate::plugin::Call;
use crate::render::{self, kind};
use crate::spec::{Error, Version, code};
use crate::subnet_env::CheckedSubnetEnv;

/// Checks subnet.env and the delegate. It never waits for one of them.
///
/// # Errors
/// [`code::NOT_AVAILABLE`] if no pod can be added; the delegate's own errors.
pub fn run(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let not_available = |text: String| Error::new(code::NOT_AVAILABLE, text);
    let env = CheckedSubnetEnv::load(&conf.subnet_file)
        .map_err(|why| not_available(format!("the node has no subnet yet: {why}")))?;
    let rendered = render::delegate(call, conf, &env)?;
    let name = kind(&rendered).to_owned();
    delegate::find(&name, &call.request.path).map_err(|error| not_available(error.msg))?;
    // A delegate that does not support STATUS cannot be asked.
    if delegate::supports(&name, Version(1, 1, 0), &call.request)? {
        delegate::call(&name, &Value::Object(rendered), Verb::Status, &call.request)?;
    }
    Ok(Vec::new())
}
