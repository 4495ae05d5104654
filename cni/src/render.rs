// SPDX-License-Identifier: Apache-2.0
//! Completes the delegate's configuration with the values of subnet.env (docs/flannel-formats.md, "The CNI plugin").

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use crate::conf::Conf;
use crate::plugin::Call;
use crate::spec::{Error, code};
use crate::subnet_env::CheckedSubnetEnv;

/// The delegate's type if the user gives none.
pub const BRIDGE: &str = "bridge";

/// Returns the delegate's complete configuration.
///
/// # Errors
/// [`code::CONFIG`] if `ipam.routes` is not a list of routes.
pub fn delegate(call: &Call, conf: &Conf, env: &CheckedSubnetEnv) -> Result<Map<String, Value>, Error> {
    let mut all = conf.delegate.clone();
    if let Some(runtime) = &conf.runtime_config {
        all.insert("runtimeConfig".to_owned(), runtime.clone());
    }
    all.insert("name".to_owned(), json!(call.name));
    let set_default = |all: &mut Map<String, Value>, key: &str, value: Value| {
        all.entry(key).or_insert(value);
    };
    set_default(&mut all, "type", json!(BRIDGE));
    // The delegate masquerades unless the agent does.
    set_default(&mut all, "ipMasq", json!(!env.ipmasq));
    set_default(&mut all, "mtu", json!(env.mtu));
    if kind(&all) == BRIDGE {
        set_default(&mut all, "isGateway", json!(true));
    }
    if let Some(version) = call.conf.get("cniVersion").and_then(Value::as_str).filter(|version| !version.is_empty()) {
        all.insert("cniVersion".to_owned(), json!(version));
    }
    all.insert("ipam".to_owned(), Value::Object(ipam(conf, env)?));
    Ok(all)
}

/// Returns the type of a delegate's configuration, or an empty string if a record of another program has none.
pub fn kind(all: &Map<String, Value>) -> &str {
    all.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn ipam(conf: &Conf, env: &CheckedSubnetEnv) -> Result<Map<String, Value>, Error> {
    let mut ipam = conf.ipam.clone();
    ipam.entry("type").or_insert(json!("host-local"));
    ipam.insert("ranges".to_owned(), ranges(env));
    let mut routes = match ipam.get("routes") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(routes)) if routes.iter().all(is_route) => routes.clone(),
        Some(other) => return Err(Error::new(code::CONFIG, format!("failed to parse ipam.routes: {other}"))),
    };
    routes.extend(env.networks.iter().map(|net| json!({"dst": net})));
    ipam.insert("routes".to_owned(), json!(routes));
    Ok(ipam)
}

/// Returns host-local's `ranges`: one set of ranges for each subnet of the node.
pub fn ranges(env: &CheckedSubnetEnv) -> Value {
    env.subnets.iter().map(|net| json!([{"subnet": net}])).collect()
}

fn is_route(route: &Value) -> bool {
    route.get("dst").and_then(Value::as_str).is_some_and(|dst| dst.parse::<IpNet>().is_ok())
}
