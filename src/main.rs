// SPDX-License-Identifier: Apache-2.0
//! The program: reads the command line, starts the log and the runtime, and runs one task.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use tokio::signal::unix::{SignalKind, signal};
use weft::cli::{self, Task, VersionForm};
use weft::commands::version::VERSION;
use weft::commands::{
    Answer, cleanup, copy, docker_options, doctor, explain, history, install_cni, leases, mesh, plan, status, ui,
    version,
};
use weft::log::text::printable;
use weft::log::{Format, Repeats};
use weft::observe::socket;
use weft::{agent, log};

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
    // Only the agent runs for so long that messages are repeated.
    let repeats = matches!(task, Task::Agent(_)).then(Arc::<Repeats>::default);
    let (verbosity, format) =
        if let Task::Agent(task) = &task { (task.verbosity, task.log_format) } else { (0, Format::Text) };
    log::init(verbosity, format, repeats.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.context("start the runtime").and_then(|runtime| {
        if let Some(repeats) = repeats.clone() {
            runtime.spawn(async move { repeats.report().await });
        }
        let done = runtime.block_on(run(task));
        runtime.shutdown_timeout(Duration::from_millis(100));
        done
    });
    if let Some(repeats) = repeats {
        repeats.log_all();
    }
    done.unwrap_or_else(|error| {
        let text = format!("{}{}", printable(&format!("{error:#}")), remedy(&error));
        match format {
            Format::Text => eprintln!("weft: {text}"),
            Format::Json => tracing::error!("weft ends: {text}"),
        }
        ExitCode::from(cli::exit::FAILURE)
    })
}

/// Returns what a user who is not root can do about a missing permission.
fn remedy(error: &anyhow::Error) -> &'static str {
    let denied = |cause: &io::Error| cause.kind() == io::ErrorKind::PermissionDenied;
    let is_denied = error.chain().any(|cause| cause.downcast_ref().is_some_and(denied));
    if is_denied && !nix::unistd::geteuid().is_root() { "; you are not root: put sudo before the command" } else { "" }
}

async fn run(task: Task) -> anyhow::Result<ExitCode> {
    let answer = match task {
        Task::Agent(task) => {
            task.notes.iter().for_each(|note| tracing::info!("{note}"));
            return agent::run(task.options, shutdown()?).await;
        }
        Task::Lab(args) => return weft_lab::main(args, shutdown).await,
        Task::History(task) => return history::run(&task).await,
        Task::Ui(task) => return ui::run(task).await,
        Task::Status(task) => status::run(&task).await?,
        Task::Plan(task) => plan::run(&task).await?,
        Task::Mesh(task) => mesh::run(&task).await?,
        Task::RotateKey(socket) => Answer::success(socket::rotate_key(&socket).await? + "\n"),
        Task::Doctor(task) => doctor::run(*task).await?,
        Task::Explain(task) => explain::run(&task).await?,
        Task::DoctorList => Answer::success(doctor::list()),
        Task::DoctorPods(sources, fix) => doctor::pods(&sources, fix)?,
        Task::Cleanup(task) => cleanup::run(&task).await?,
        Task::Release(task) => leases::release(&task).await?,
        Task::LeaseList(store) => leases::list(&store).await?,
        Task::LeaseRemove(store, id) => leases::remove(&store, &id).await?,
        Task::InstallCni(flags) => install_cni::run(&flags)?,
        Task::Copy(files) => copy::copy(&files.from, &files.to).map(|()| Answer::success(""))?,
        Task::DockerOptions(options) => {
            docker_options::run(&options, cli::environment()).map(|()| Answer::success(""))?
        }
        Task::Version(VersionForm::Text) => Answer::success(format!("{VERSION}\n")),
        Task::Version(VersionForm::Json) => Answer::success(version::as_json() + "\n"),
        Task::Version(VersionForm::Stderr) => {
            eprintln!("{VERSION}");
            Answer::success("")
        }
    };
    // If standard output cannot be written, nobody has seen the answer.
    let printed = print(&answer.text);
    Ok(if printed == ExitCode::SUCCESS { answer.code } else { printed })
}

/// Returns a future that ends with the first SIGTERM or SIGINT. The second signal ends the process at once, in the signal
/// handler, because a disk that hangs may keep the only thread in a system call.
fn shutdown() -> anyhow::Result<impl Future<Output = ()>> {
    let mut term = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut int = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let asked = Arc::new(AtomicBool::new(false));
    for number in [SIGTERM, SIGINT] {
        // Handlers run in this order, so the flag is still unset at the first signal.
        flag::register_conditional_shutdown(number, i32::from(cli::exit::FAILURE), asked.clone())
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
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => ExitCode::from(cli::exit::FAILURE),
        _ => ExitCode::SUCCESS,
    }
}
