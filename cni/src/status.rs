// SPDX-License-Identifier: Apache-2.0
//! STATUS: could a pod be added now?

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

/// Asks file, agent, and delegate; never waits for one of them to come.
///
/// # Errors
/// [`code::NOT_AVAILABLE`]; [`code::LIMITED`] when pods were added before and the agent says that it is not ready; the
/// delegate's own.
pub fn run(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let not_now = |text: String| Error::new(code::NOT_AVAILABLE, text);
    let env =
        SubnetEnv::load(&conf.subnet_file).map_err(|why| not_now(format!("the node has no subnet yet: {why}")))?;
    if let Agent::NotReady(why) = wait::agent(&conf.socket) {
        return Err(Error::new(code::LIMITED, format!("the agent is not ready: {why}")));
    }
    if let Some(dir) = hostlocal::dir(&conf.ipam, &call.name) {
        free_address(&dir, &env)?;
    }
    let rendered = render::delegate(call, conf, &env)?;
    let name = kind(&rendered).to_owned();
    delegate::find(&name, &call.request.path).map_err(|error| not_now(error.msg))?;
    // Delegates that do not know the verb have no word in it.
    if delegate::speaks(&name, Version(1, 1, 0), &call.request)? {
        delegate::call(&name, &Value::Object(rendered), Verb::Status, &call.request)?;
    }
    Ok(Vec::new())
}

/// host-local does not know STATUS: whether it has an address left is seen here.
fn free_address(dir: &Path, env: &SubnetEnv) -> Result<(), Error> {
    let taken = hostlocal::list(dir)?;
    for net in &env.subnets {
        let IpNet::V4(v4) = net else { continue };
        // Without network, broadcast and gateway; nobody can fill an IPv6 subnet.
        let usable = (1_u64 << (32 - v4.prefix_len())).saturating_sub(3);
        let used = taken.iter().filter(|reservation| net.contains(&reservation.addr)).count() as u64;
        if used >= usable {
            let text = format!("all {usable} addresses of {net} are taken (see {})", dir.display());
            return Err(Error::new(code::NOT_AVAILABLE, text));
        }
    }
    Ok(())
}
