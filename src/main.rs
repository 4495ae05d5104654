// SPDX-License-Identifier: Apache-2.0
//! The program: reads the command line, starts the log and the runtime, and runs one task.

use std::io::{self, Write};
use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use tokio::signal::unix::{SignalKind, signal};
use weft::cli::flags::InstallFlags;
use weft::cli::{self, CleanupTask, ReleaseTask, Task, VersionForm};
use weft::commands::cleanup;
use weft::commands::cleanup::Running;
use weft::commands::copy;
use weft::commands::docker_options;
use weft::commands::doctor;
use weft::commands::history;
use weft::commands::install_cni;
use weft::commands::mesh;
use weft::instance::Instance;
use weft::kernel::Kernel;
use weft::lease::admin;
use weft::log::text::printable;
use weft::observe::socket;
use weft::observe::status;
use weft::sysctls::loosened::Loosened;
use weft::{agent, conflist, extension, files, firewall, log, observe, saved};
use weft_subnet::cidr::Subnets;
use weft_subnet::env::SubnetEnv;

#[global_allocator]
static HEAP: weft_heap::Heap = weft_heap::Heap;

fn main() -> ExitCode {
    let task = match cli::parse() {
        Ok(task) => task,
        Err(exit) if exit.help => return print(&format!("{}\n", exit.text)),
        Err(exit) => {
            eprintln!("weft: {}", exit.text);
            return ExitCode::from(exit.code);
        }
    };
    log::init(if let Task::Agent(task) = &task { task.verbosity } else { 0 });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.context("start the runtime").and_then(|runtime| {
        let done = runtime.block_on(run(task));
        runtime.shutdown_timeout(Duration::from_millis(100));
        done
    });
    done.unwrap_or_else(|error| {
        eprintln!("weft: {}{}", printable(&format!("{error:#}")), remedy(&error));
        ExitCode::from(cli::FAILURE)
    })
}

/// Returns what a user who is not root can do about a missing permission.
fn remedy(error: &anyhow::Error) -> &'static str {
    let denied = |cause: &io::Error| cause.kind() == io::ErrorKind::PermissionDenied;
    let is_denied = error.chain().any(|cause| cause.downcast_ref().is_some_and(denied));
    if is_denied && !nix::unistd::geteuid().is_root() { "; you are not root: put sudo before the command" } else { "" }
}

async fn run(task: Task) -> anyhow::Result<ExitCode> {
    match task {
        Task::Agent(task) => {
            task.notes.iter().for_each(|note| tracing::info!("{note}"));
            agent::run(task.options, shutdown()?).await
        }
        Task::Status { socket, json, rules } => {
            let answer = socket::ask_status(&socket).await?;
            let text = match (json, rules) {
                (true, false) => serde_json::to_string_pretty(&answer)? + "\n",
                (true, true) => serde_json::to_string_pretty(&answer.rules)? + "\n",
                (false, false) => status::table::render(&answer, status::now_ms()),
                (false, true) => status::table::rules(&answer),
            };
            Ok(print(&text))
        }
        Task::Plan(question) => plan(&question.socket, question.json).await,
        Task::RotateKey(socket) => Ok(print(&format!("{}\n", socket::rotate_key(&socket).await?))),
        Task::History(task) => history::run(&task).await,
        Task::Mesh(task) => mesh::run(&task).await.map(|(text, code)| {
            print(&text);
            code
        }),
        Task::Cleanup(task) => cleanup(&task).await,
        Task::InstallCni(flags) => install_cni(flags),
        Task::Copy(files) => copy::copy(&files.from, &files.to).map(|()| ExitCode::SUCCESS),
        Task::DockerOptions(options) => docker_options::run(&options, cli::environment()).map(|()| ExitCode::SUCCESS),
        Task::Release(task) => release(task).await,
        Task::LeaseList(store) => {
            let records = agent::open_existing_store(&store)?.list().await.context("list leases")?;
            Ok(print(&admin::render(&records)))
        }
        Task::LeaseRemove(store, id) => {
            agent::open_existing_store(&store)?.remove(&id).await.with_context(|| format!("remove lease {id}"))?;
            Ok(print(&printable(&format!("removed {id}\n"))))
        }
        Task::Version(form) => version(form),
        Task::Doctor(task) => {
            let (text, code) = doctor::run(*task).await?;
            // If standard output cannot be written, nobody has seen the findings.
            let printed = print(&text);
            Ok(if printed == ExitCode::SUCCESS { code } else { printed })
        }
        Task::DoctorList => Ok(print(&doctor::list())),
        Task::DoctorPods(sources, fix) => doctor_pods(&sources, fix),
        Task::Lab(args) => weft_lab::main(args, shutdown()?).await,
    }
}

fn install_cni(InstallFlags { from, bin_dir, agent }: InstallFlags) -> anyhow::Result<ExitCode> {
    let mut done = install_cni::install(&from, &bin_dir)?;
    // Pods do not need the program `weft`, so a failure to install it is not an error.
    match agent.map(|agent| install_cni::agent(&agent, &bin_dir)).transpose() {
        Ok(copied) => done.extend(copied),
        Err(error) => eprintln!("weft: {error:#}; `weft` was not installed beside the plugin"),
    }
    let word = |written| if written { "written" } else { "was there already" };
    let lines = done.iter().map(|one| format!("{} {}\n", one.path.display(), word(one.written)));
    Ok(print(&lines.collect::<String>()))
}

fn version(form: VersionForm) -> anyhow::Result<ExitCode> {
    let version = env!("CARGO_PKG_VERSION");
    Ok(match form {
        VersionForm::Text => print(&format!("{version}\n")),
        VersionForm::Stderr => {
            eprintln!("{version}");
            ExitCode::SUCCESS
        }
        VersionForm::Json => {
            let stores: &[&str] = if cfg!(feature = "kube") { &["etcd", "dir", "kube"] } else { &["etcd", "dir"] };
            let build = json!({"version": version, "architecture": std::env::consts::ARCH, "stores": stores});
            print(&format!("{build}\n"))
        }
    })
}

/// `weft plan`. Scripts tell by the exit code whether there is anything to write.
async fn plan(socket: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let plan = socket::ask_plan(socket).await?;
    let text = if json { serde_json::to_string_pretty(&plan)? + "\n" } else { observe::plan::render(&plan) };
    let printed = print(&text);
    Ok(if plan.operations.is_empty() { printed } else { ExitCode::from(cli::DIFFERENCE) })
}

fn doctor_pods(sources: &weft_doctor::Sources, fix: bool) -> anyhow::Result<ExitCode> {
    let report = weft_doctor::examine(sources).context("examine pods")?;
    let printed = print(&printable(&report.render(sources)));
    let mut left = report.leaks().count();
    if fix {
        let done = weft_doctor::fix(&report, sources);
        left = done.iter().filter(|done| done.is_err()).count();
        done.iter().for_each(|done| match done {
            Ok(text) => drop(print(&printable(&format!("{text}\n")))),
            Err(error) => eprintln!("weft: {}", printable(&error.to_string())),
        });
    }
    Ok(if left == 0 { printed } else { ExitCode::from(cli::FAILURE) })
}

/// Returns the agents of other subnet files that run.
///
/// # Errors
/// The agent of this subnet file runs. `why` says what it would do.
fn other_agents(socket: &Path, subnet_file: &Path, why: &str) -> anyhow::Result<Vec<Running>> {
    if socket::answers(socket) {
        anyhow::bail!("an agent answers on {}: stop it first, {why}", socket.display());
    }
    let agents = cleanup::running_agents().context("look for running agents")?;
    if let Some(agent) = agents.iter().find(|agent| agent.may_have(subnet_file)) {
        anyhow::bail!("{} runs with the subnet file {}: stop it first, {why}", agent.what, subnet_file.display());
    }
    Ok(agents)
}

async fn cleanup(task: &CleanupTask) -> anyhow::Result<ExitCode> {
    let others = other_agents(&task.socket, &task.subnet_file, "it would write everything again")?;
    let env = files::read_text(&task.subnet_file).ok().and_then(|text| SubnetEnv::parse(&text));
    let networks = env.map(|env| env.networks).unwrap_or_default();
    if let Some(other) = others.first() {
        let (file, other) = (task.subnet_file.display(), &other.what);
        // Without a network, the routes of all agents would be removed.
        if networks == Subnets::default() {
            anyhow::bail!(
                "{file} names no network, so the routes of {other} cannot be told from those to remove: stop it first"
            );
        }
        if task.flannel_devices {
            anyhow::bail!("--flannel-devices would take the devices of {other}: stop it first");
        }
    }
    let mut kernel = agent::open_kernel(&task.subnet_file)?;
    let scope = cleanup::Scope { networks, flannel_devices: task.flannel_devices };
    let mut report = cleanup::cleanup(&mut kernel, &scope).context("clean up")?;
    let rules = firewall::remove_all(&Instance::new(&task.subnet_file)).await.unwrap_or_else(|errors| {
        report.failed.extend(errors.iter().map(ToString::to_string));
        false
    });
    let unlinked = conflist::remove(&task.cni_conf_dir, &task.subnet_file).unwrap_or_else(|error| {
        report.failed.push(format!("remove the CNI configuration from {}: {error}", task.cni_conf_dir.display()));
        false
    });
    report.failed.extend(Loosened::beside(&task.subnet_file).ensure(None, true));
    if let Err(error) = saved::remove(&task.state_dir, &task.subnet_file) {
        report.failed.push(format!("remove the saved peers: {error}"));
    }
    if let Err(error) = observe::history::recorder::remove(&task.state_dir, &task.subnet_file) {
        report.failed.push(format!("remove the history: {error}"));
    }
    if let Err(error) = extension::memory::remove(&task.state_dir, &task.subnet_file) {
        report.failed.push(format!("remove the peers of the commands of extension: {error}"));
    }
    for name in &report.left {
        eprintln!(
            "weft: {name} was not made by this agent and stays: give --flannel-devices to remove it if flanneld made it"
        );
    }
    report.failed.iter().for_each(|text| eprintln!("weft: {}", printable(text)));
    let also = [(rules, " and the traffic rules"), (unlinked, " and the CNI configuration")];
    let also: String = also.iter().filter(|(done, _)| *done).map(|(_, text)| *text).collect();
    let printed = print(&format!("removed {} entries{also}\n", report.removed));
    Ok(if report.failed.is_empty() { printed } else { ExitCode::from(cli::FAILURE) })
}

async fn release(task: ReleaseTask) -> anyhow::Result<ExitCode> {
    other_agents(&task.socket, &task.subnet_file, "it would take the lease again")?;
    let file = task.subnet_file.display();
    let text = files::read_text(&task.subnet_file)
        .with_context(|| format!("read {file}, which says what our subnet is (else: weft lease rm)"))?;
    let env = SubnetEnv::parse(&text).with_context(|| format!("{file} names no subnet: use weft lease rm"))?;
    let machine = agent::open_kernel(&task.subnet_file)?.machine().context("read the addresses of this machine")?;
    let ours: Vec<IpAddr> = machine.addrs.iter().map(|addr| addr.net.addr()).chain(task.public).collect();
    let source = agent::open_existing_store(&task.store)?;
    let subnets = admin::release(source.as_ref(), &env.subnets, &ours).await?;
    // A start without the store must not use this lease again.
    if let Err(error) = saved::remove(&task.state_dir, &task.subnet_file) {
        eprintln!("weft: remove the saved peers: {error}");
    }
    Ok(print(&format!("released {subnets}\n")))
}

/// Returns a future that ends with the first SIGTERM or SIGINT. The second signal ends the process at once, in the signal
/// handler, because a disk that hangs may keep the only thread in a system call.
fn shutdown() -> anyhow::Result<impl Future<Output = ()>> {
    let mut term = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut int = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let asked = Arc::new(AtomicBool::new(false));
    for number in [SIGTERM, SIGINT] {
        // Handlers run in this order, so the flag is still unset at the first signal.
        flag::register_conditional_shutdown(number, i32::from(cli::FAILURE), asked.clone())
            .and_then(|_| flag::register(number, asked.clone()))
            .context("listen for a second signal")?;
    }
    Ok(async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
    })
}

/// Prints to standard output. It is not a failure if the reader has closed it, as `head` does.
fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => ExitCode::from(cli::FAILURE),
        _ => ExitCode::SUCCESS,
    }
}
