// SPDX-License-Identifier: Apache-2.0
//! STATUS: reports whether a pod could be added now.

use std::path::Path;

use ipnet::IpNet;
use serde_json::Value;

use crate::conf::Conf;
use crate::delegate;
use crate::env::Verb;
use crate::hostlocal;
use crate::plugin::Call;
use crate::render::{self, kind};
use crate::spec::{Error, Version, code};
use crate::subnet_env::SubnetEnv;
use crate::wait::{self, Agent};

/// Checks subnet.env, the agent, the free addresses and the delegate. It never waits for one of them.
///
/// # Errors
/// [`code::NOT_AVAILABLE`] if no pod can be added; [`code::LIMITED`] if there is a subnet.env, but the agent says that
/// it is not ready; the delegate's own errors.
pub fn run(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let not_available = |text: String| Error::new(code::NOT_AVAILABLE, text);
    let env = SubnetEnv::load(&conf.subnet_file)
        .map_err(|why| not_available(format!("the node has no subnet yet: {why}")))?;
    if let Agent::NotReady(why) = wait::agent(&conf.socket) {
        return Err(Error::new(code::LIMITED, format!("the agent is not ready: {why}")));
    }
    if let Some(dir) = hostlocal::dir(&conf.ipam, &call.name) {
        free_address(&dir, &env)?;
    }
    let rendered = render::delegate(call, conf, &env)?;
    let name = kind(&rendered).to_owned();
    delegate::find(&name, &call.request.path).map_err(|error| not_available(error.msg))?;
    // A delegate that does not support STATUS cannot be asked.
    if delegate::supports(&name, Version(1, 1, 0), &call.request)? {
        delegate::call(&name, &Value::Object(rendered), Verb::Status, &call.request)?;
    }
    Ok(Vec::new())
}

/// Checks that host-local has a free address for the pod. host-local versions before 1.1.0 do not support STATUS.
fn free_address(dir: &Path, env: &SubnetEnv) -> Result<(), Error> {
    let reservations = hostlocal::list(dir)?;
    for net in &env.subnets {
        let IpNet::V4(v4) = net else { continue };
        // The network, broadcast and gateway addresses cannot be used. An IPv6 subnet is too large to run out of
        // addresses.
        let usable = (1_u64 << (32 - v4.prefix_len())).saturating_sub(3);
        let used = reservations.iter().filter(|reservation| net.contains(&reservation.addr)).count() as u64;
        if used >= usable {
            let text = format!("all {usable} addresses of {net} are taken (see {})", dir.display());
            return Err(Error::new(code::NOT_AVAILABLE, text));
        }
    }
    Ok(())
}
