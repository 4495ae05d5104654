// SPDX-License-Identifier: Apache-2.0
//! The plugin that takes the place of flannel's.

use serde_json::{Map, Value};

use crate::bridge;
use crate::conf::Conf;
use crate::delegate;
use crate::env::{Request, Verb};
use crate::plugin::Call;
use crate::record::{self, Locked};
use crate::render::{self, kind};
use crate::spec::{Error, code};
use crate::subnet_env::SubnetEnv;
use crate::{gc, status, wait};

/// Answers one call.
///
/// # Errors
/// What goes to standard output.
pub fn answer(call: &Call) -> Result<Vec<u8>, Error> {
    let conf = Conf::read(&call.conf);
    match call.request.verb {
        Verb::Add => add(call, &conf?),
        // A configuration that was edited since must not keep a pod from being taken back.
        Verb::Del => del(call, &conf.or_else(|_| Conf::places(&call.conf))?),
        Verb::Check => check(call, &conf?),
        Verb::Gc => gc::run(call, &conf?),
        Verb::Status => status::run(call, &conf?),
        // Answered before.
        Verb::Version => Ok(Vec::new()),
    }
}

fn add(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let request = &call.request;
    request.check_netns()?;
    let env = wait::for_agent(conf)?;
    let rendered = render::delegate(call, conf, &env)?;
    // Before the record: what cannot be started leaves nothing behind.
    delegate::find(kind(&rendered), &request.path)?;
    bridge::mend(&rendered, &env)?;
    let value = Value::Object(rendered);
    note!("delegate's configuration: {value}");
    let Value::Object(rendered) = &value else { return Ok(Vec::new()) };
    let locked = record::write(&conf.data_dir, request, rendered)?;
    delegate::call(kind(rendered), &value, Verb::Add, request).inspect_err(|_| roll_back(locked, request))
}

/// A failed ADD is taken back at once; where that fails, the record stays for the runtime's DEL, or for GC. One for a pod that
/// was added before is not: that pod may be alive.
fn roll_back(locked: Locked, request: &Request) {
    if !locked.first {
        note!("{} was there before: DEL takes it back", locked.record.path.display());
    } else if let Err(error) = take_back(locked, request) {
        note!("take back what the failed ADD left: {error}");
    }
}

/// The delegate's DEL with the recorded configuration; the record goes when it succeeded.
///
/// # Errors
/// The delegate's, unchanged; [`code::IO`].
pub fn take_back(locked: Locked, request: &Request) -> Result<(), Error> {
    let Some(conf) = locked.record.conf.clone() else {
        note!("{} is no JSON: it is kept, nothing can be taken back by it", locked.record.path.display());
        return Ok(());
    };
    let name = kind(&conf).to_owned();
    delegate::call(&name, &Value::Object(conf), Verb::Del, request)?;
    locked.remove()
}

fn del(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let mut request = call.request.clone();
    // A path by process id may lead to the host's namespace by now: the delegate would take down the host's own interface.
    if matches!(request.is_own_netns(), Ok(true)) {
        note!("netns {} is the plugin's own: the pod's is gone", request.netns);
        request.netns.clear();
    }
    if let Some(locked) = record::find(&conf.data_dir, &request.container, &request.ifname)? {
        take_back(locked, &request)?;
    }
    Ok(Vec::new())
}

/// The delegate compares its result with what is there; we, whether the node still has the subnet that the pod lives in.
fn check(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let request = &call.request;
    request.check_netns()?;
    let Some(result) = call.conf.get("prevResult").filter(|result| result.is_object()) else {
        return Err(Error::new(code::CONFIG, "prevResult is missing"));
    };
    let text = format!("no record of {} {} in {}", request.container, request.ifname, conf.data_dir.display());
    let locked = record::find(&conf.data_dir, &request.container, &request.ifname)?
        .ok_or_else(|| Error::new(code::UNKNOWN_CONTAINER, text))?;
    let text = format!("{} is no JSON", locked.record.path.display());
    let mut rendered = locked.record.conf.clone().ok_or_else(|| Error::new(code::DECODE, text))?;
    for key in ["prevResult", "cniVersion", "runtimeConfig"] {
        if let Some(value) = call.conf.get(key) {
            rendered.insert(key.to_owned(), value.clone());
        }
    }
    if let Some(routes) = rendered.get_mut("prevResult").and_then(|result| result.get_mut("routes")?.as_array_mut()) {
        name_gateways(routes, result);
    }
    if let Ok(env) = SubnetEnv::load(&conf.subnet_file) {
        addresses_are_ours(result, &rendered, &env)?;
    }
    let name = kind(&rendered).to_owned();
    delegate::call(&name, &Value::Object(rendered), Verb::Check, request).map(|_| Vec::new())
}

/// A route without a gateway goes through that of the pod's address. The bridge and ptp plugins know that when they add it,
/// and forget it when they look for it.
fn name_gateways(routes: &mut [Value], result: &Value) {
    let is_v6 = |value: &Value| value.as_str().is_some_and(|text| text.contains(':'));
    for route in routes.iter_mut().filter(|route| route["gw"].is_null()) {
        let same_family = |ip: &&Value| is_v6(&ip["address"]) == is_v6(&route["dst"]);
        let gateway = result["ips"].as_array().into_iter().flatten().find(same_family).map(|ip| ip["gateway"].clone());
        if let Some(gateway) = gateway.filter(Value::is_string) {
            route["gw"] = gateway;
        }
    }
}

fn addresses_are_ours(result: &Value, rendered: &Map<String, Value>, env: &SubnetEnv) -> Result<(), Error> {
    let recorded = &rendered["ipam"]["ranges"];
    let now = serde_json::json!(env.subnets.iter().map(|net| serde_json::json!([{"subnet": net}])).collect::<Vec<_>>());
    if *recorded == now {
        return Ok(());
    }
    let text =
        format!("the pod was added in the subnets {recorded}, the node has {now} now: the pod must be added again");
    Err(Error::new(code::OTHER, text).details(result["ips"].to_string()))
}
